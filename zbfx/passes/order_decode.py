"""Two decoders from an order of F and B to a whole schedule: `follow` keeps a given word per rank, `dispatch` decides as
time goes by.

Both place the Ws: where the next F or B is not ready for long enough, where memory holds an F back, and at the end. Both
never let
a rank hold more than its room. They return the span and the makespan in seconds, and the ranks' full words when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from zbfx.passes.order_problem import INF, Full, Problem, Word

_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Rules:
    """How W and idle time are treated. Times are in units of the W or of the action concerned.

    fill: run a W when the gap is at least fill * W long (1: never delay; 0: whenever there is a gap); fill_end: the same once a
    rank has no F left. ahead_f, ahead_b: `follow` may pull a ready F (only before the first B, or always) or B into a gap.
    guard: `follow` keeps room for the oldest microbatch. lead, patience, w_first: `dispatch` waits for an action that is more
    urgent by `lead` seconds of key if it comes within patience * the other's time; frees memory by a W if the F held
    back is more urgent by `w_first`.
    """

    fill: float = 0.6
    fill_end: float = 1.0
    ahead_f: int = 0  # 0 never, 1 before the first B of the rank, 2 always
    ahead_b: bool = True
    guard: bool = False
    lead: float = 0.0
    patience: float = 0.0
    w_first: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a decoder found: seconds of span and makespan (infinite: it got stuck), and the full words where they were kept."""

    span: float
    makespan: float
    words: tuple[Full, ...] = ()
    letters: int = 0  # Fs and Bs decoded: fewer than all where it stopped early

    def cost(self, objective: str) -> tuple[float, float]:
        """The objective first, the other of the two to break ties."""
        return (self.span, self.makespan) if objective == "span" else (self.makespan, self.span)


@dataclass(frozen=True, slots=True)
class Cutoff:
    """A decoder gives up once a rank has idled so long that the objective must exceed `seconds`."""

    seconds: float = INF
    from_zero: bool = False  # the objective is the makespan: waiting for the first action counts too

    def slack(self, problem: Problem) -> list[float]:
        """Seconds that each rank may idle."""
        return [self.seconds * (1 + 1e-12) + _EPS - work for work in problem.work]


NO_CUTOFF = Cutoff()


def follow(problem: Problem, order: Sequence[Word], rules: Rules, *, keep: bool = False, cutoff: Cutoff = NO_CUTOFF) -> Outcome:
    """Runs each rank's word in order. An F that does not fit waits for Ws; without any, what comes later and fits is
    pulled forward.

    Ranks are run one after the other as far as their inputs are known, so no event queue is needed: a gap's length is
    known exactly.
    """
    run = _Following(problem, order, rules, keep, cutoff)
    ready = list(range(problem.num_ranks - 1, -1, -1))
    queued = [True] * problem.num_ranks
    while ready:
        rank = ready.pop()
        queued[rank] = False
        woken = run.advance(rank)
        if woken is None:
            return Outcome(INF, INF, (), sum(run.count))
        for other in woken:
            if not queued[other]:
                queued[other] = True
                ready.append(other)
    return run.finish()


class _Following:
    """The state of `follow`: arrival times, clocks, bytes held and Ws that wait, per rank."""

    def __init__(self, problem: Problem, order: Sequence[Word], rules: Rules, keep: bool, cutoff: Cutoff) -> None:
        m, nodes = problem.microbatches, len(problem.rank)
        self.problem, self.rules = problem, rules
        self.words = [list(word) for word in order]
        self.arrival: list[list[float]] = [[0.0] * m + [INF]] + [[INF] * (m + 1) for _ in range(nodes)]
        self.count = [0] * nodes
        ranks = problem.num_ranks
        self.at, self.clock, self.held = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.first: list[float] = [-1.0] * ranks
        self.pending: list[list[int]] = [[] for _ in range(ranks)]
        self.done_w = [0] * ranks
        self.forwards = [[v for v in own if v < problem.num_stages] for own in problem.nodes]
        self.backwards = [[v for v in reversed(own) if v >= problem.num_stages] for own in problem.nodes]
        self.f_left = [len(own) * m for own in self.forwards]
        self.b_done = [0] * ranks
        self.out: list[Full] = [[] for _ in range(ranks)]
        self.keep = keep
        self.slack, self.from_zero = cutoff.slack(problem), cutoff.from_zero

    def advance(self, r: int) -> list[int] | None:
        """Runs rank r until an input is not known yet; returns the ranks whose next input it made, None where nothing fits
        or it idled too long."""
        problem, rules = self.problem, self.rules
        arrival, count, seconds, memory = self.arrival, self.count, problem.seconds, problem.memory
        stages, parts, reserve = problem.num_stages, problem.parts, problem.reserve
        w_seconds, w_memory, hop, last = problem.w_seconds, problem.w_memory, problem.hop, len(count)
        words, at = self.words, self.at
        word, pending, out, length = words[r], self.pending[r], self.out[r], len(words[r])
        i, t, held, w, f_left = self.at[r], self.clock[r], self.held[r], self.done_w[r], self.f_left[r]
        room, keep, guard = problem.room[r] + _EPS, self.keep, rules.guard
        woken: list[int] = []
        while i < length:
            v = word[i]
            if v < stages and held + memory[v] + (reserve[v] if guard else 0.0) > room and not self._fits(r, v, room - held):
                if w < len(pending):
                    s = pending[w]
                    w += 1
                    t += w_seconds[s]
                    held -= w_memory[s]
                    if keep:
                        out.append((s, 2))
                    continue
                k = self._pull(r, i, room - held)
                if k < 0:
                    return None
                word.insert(i, word.pop(k))
                continue
            ready = arrival[v][count[v]]
            if ready == INF:
                break
            if ready > t:
                gap = ready - t
                x = self._ahead_b(r, v, t, gap) if rules.ahead_b else -1
                if x < 0 and w < len(pending):
                    s = pending[w]
                    # The last node feeds nobody: once no F is left, a W in front of it can only help.
                    fill = rules.fill if f_left else (rules.fill_end if v + 1 < last else 0.0)
                    if gap >= fill * w_seconds[s] - _EPS:
                        w += 1
                        t += w_seconds[s]
                        held -= w_memory[s]
                        if keep:
                            out.append((s, 2))
                        continue
                if x < 0 and f_left and (rules.ahead_f == 2 or (rules.ahead_f == 1 and self.b_done[r] == 0)):
                    x = self._ahead_f(r, v, t, gap, room - held)
                if x >= 0:
                    del word[word.index(x, i + 1)]
                    word.insert(i, x)
                    v = x
                else:
                    if self.first[r] >= 0 or self.from_zero:
                        self.slack[r] -= ready - t
                        if self.slack[r] < 0:
                            return None
                    t = ready
            if self.first[r] < 0:
                self.first[r] = t
            t += seconds[v]
            held += memory[v]
            j = count[v]
            count[v] = j + 1
            i += 1
            if v < stages:
                f_left -= 1
                if keep:
                    out.append((problem.stage[v], 0))
            else:
                s = problem.stage[v]
                pending.extend([s] * parts)
                self.b_done[r] += 1
                if keep:
                    out.append((s, 1))
            arrival[v + 1][j] = t + hop[v]
            if v + 1 < last:
                other = problem.rank[v + 1]
                k, theirs = at[other], words[other]
                if other != r and k < len(theirs) and theirs[k] == v + 1 and count[v + 1] == j:
                    woken.append(other)
        self.at[r], self.clock[r], self.held[r], self.done_w[r], self.f_left[r] = i, t, held, w, f_left
        return woken

    def finish(self) -> Outcome:
        """Runs the Ws that are left; stuck if any rank has not come to the end of its word."""
        problem = self.problem
        span = makespan = 0.0
        for r, word in enumerate(self.words):
            if self.at[r] < len(word):
                return Outcome(INF, INF, (), sum(self.count))
            t = self.clock[r]
            for s in self.pending[r][self.done_w[r] :]:
                t += problem.w_seconds[s]
                if self.keep:
                    self.out[r].append((s, 2))
            makespan = max(makespan, t)
            span = max(span, t - self.first[r])
        return Outcome(span, makespan, tuple(self.out) if self.keep else (), sum(self.count))

    def _fits(self, r: int, v: int, free: float) -> bool:
        return fits(self.problem, self.forwards[r], self.count, v, free, self.rules.guard)

    def _pull(self, r: int, i: int, free: float) -> int:
        """The first later place in the word whose action may run now as far as this rank's own order and memory go; -1 for
        none."""
        word, count, before = self.words[r], self.count, self.problem.before
        seen = {word[i]}
        for k in range(i + 1, len(word)):
            x = word[k]
            if x in seen:
                continue
            seen.add(x)
            if before[x] >= 0 and count[before[x]] <= count[x]:
                continue
            if x >= self.problem.num_stages or self._fits(r, x, free):
                return k
        return -1

    def _ahead_b(self, r: int, v: int, t: float, gap: float) -> int:
        for x in self.backwards[r]:
            if x != v and self.problem.seconds[x] <= gap + _EPS and self.arrival[x][self.count[x]] <= t:
                return x
        return -1

    def _ahead_f(self, r: int, v: int, t: float, gap: float, free: float) -> int:
        problem, count = self.problem, self.count
        free -= problem.memory[v] if v < problem.num_stages else 0.0
        for x in self.forwards[r]:
            ready = x != v and problem.seconds[x] <= gap + _EPS and self.arrival[x][count[x]] <= t
            if ready and fits(problem, self.forwards[r], count, x, free, True):
                return x
        return -1


def fits(problem: Problem, forwards: Sequence[int], count: Sequence[int], v: int, free: float, guard: bool) -> bool:
    """Whether F node v fits into `free` bytes; with guard, so that the oldest microbatch on the rank can still run its
    later Fs."""
    free -= problem.memory[v]
    if free < 0:
        return False
    if not guard or free >= problem.reserve[v]:
        return True
    oldest = count[forwards[-1]]
    if oldest >= count[v]:
        return False  # v itself belongs to the oldest, and its own later Fs would not fit
    last_done = forwards[0]
    for x in forwards:
        if count[x] <= oldest:
            break
        last_done = x
    return free >= problem.reserve[last_done]


def dispatch(
    problem: Problem, keys: Sequence[Sequence[float]], rules: Rules, *, keep: bool = False, cutoff: Cutoff = NO_CUTOFF
) -> Outcome:
    """Decides in order of time: a free rank runs the ready F or B with the smallest key, or a W, or waits, by the rules.

    keys[v][mb] are priorities, one more entry per node at the end (any). With the guard built in it always comes to an end.
    """
    m, nodes, ranks = problem.microbatches, len(problem.rank), problem.num_ranks
    stages, seconds, memory, parts, reserve = problem.num_stages, problem.seconds, problem.memory, problem.parts, problem.reserve
    w_seconds, w_memory, hop, home = problem.w_seconds, problem.w_memory, problem.hop, problem.rank
    arrival: list[list[float]] = [[0.0] * m + [INF]] + [[INF] * (m + 1) for _ in range(nodes)]
    count, held, busy = [0] * nodes, [0.0] * ranks, [0.0] * ranks
    first, last = [-1.0] * ranks, [0.0] * ranks
    pending: list[list[int]] = [[] for _ in range(ranks)]
    done_w = [0] * ranks
    forwards = [[v for v in own if v < stages] for own in problem.nodes]
    own_nodes = [tuple(reversed(own)) for own in problem.nodes]
    f_left = [len(own) * m for own in forwards]
    todo = nodes * m
    out: list[Full] = [[] for _ in range(ranks)]
    heap = [(0.0, r) for r in range(ranks)]
    slack = cutoff.slack(problem)
    while heap:
        t, r = heappop(heap)
        if busy[r] > t:
            continue
        free, now = problem.room[r] + _EPS - held[r], t + _EPS
        best, soon_node, best_key, soon, urgent, urgent_at, blocked = -1, -1, INF, INF, INF, INF, INF
        for v in own_nodes[r]:
            j = count[v]
            ready = arrival[v][j]
            if ready <= now:
                key = keys[v][j]
                if v < stages and free < memory[v] + reserve[v] and not fits(problem, forwards[r], count, v, free, True):
                    if key < blocked:
                        blocked = key
                elif key < best_key:
                    best, best_key = v, key
            elif ready < INF:
                if ready < soon:
                    soon, soon_node = ready, v
                if keys[v][j] < urgent:
                    urgent, urgent_at = keys[v][j], ready
        w = done_w[r]
        has_w = w < len(pending[r])
        if has_w:
            # The last node feeds nobody: once no F is left, a W in front of it can only help.
            share = rules.fill if f_left[r] else (rules.fill_end if soon_node < nodes - 1 else 0.0)
            fill = share * w_seconds[pending[r][w]] - _EPS
        else:
            fill = INF
        wants_w = has_w and (blocked < INF or soon - t >= fill)
        if best >= 0:
            if has_w and blocked < best_key - rules.w_first:
                best, wants_w = -1, True
            elif urgent < best_key - rules.lead and urgent_at - t < rules.patience * seconds[best]:
                best, wants_w, soon = -1, has_w and urgent_at - t >= fill, urgent_at
        if best >= 0:
            v, j = best, count[best]
            end = t + seconds[v]
            if first[r] < 0:
                first[r] = t
                idle = t if cutoff.from_zero else 0.0
            else:
                idle = t - last[r]
            slack[r] -= idle
            if slack[r] < 0:
                return Outcome(INF, INF, (), sum(count))
            held[r] += memory[v]
            count[v] = j + 1
            todo -= 1
            if v < stages:
                f_left[r] -= 1
            else:
                pending[r].extend([problem.stage[v]] * parts)
            if keep:
                out[r].append((problem.stage[v], 0 if v < stages else 1))
            if v + 1 < nodes:
                ready = arrival[v + 1][j] = end + hop[v]
                other = home[v + 1]
                if busy[other] <= ready:
                    heappush(heap, (ready, other))
        elif wants_w:
            s = pending[r][w]
            slack[r] -= t - last[r]
            done_w[r] = w + 1
            held[r] -= w_memory[s]
            end = t + w_seconds[s]
            if keep:
                out[r].append((s, 2))
        else:
            if soon < INF:
                heappush(heap, (soon, r))
            continue
        busy[r] = last[r] = end
        heappush(heap, (end, r))
    if todo:
        return Outcome(INF, INF, (), sum(count))
    for r in range(ranks):
        for s in pending[r][done_w[r] :]:
            last[r] += w_seconds[s]
            if keep:
                out[r].append((s, 2))
    span = max(b - a for a, b in zip(first, last, strict=True))
    return Outcome(span, max(last), tuple(out) if keep else (), sum(count))
