"""The decoder that keeps a given word per rank: `follow`. Ws float; F and B move only where the rules or memory ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.passes.order_decode import EPS, NO_CUTOFF, Cutoff, Outcome, Rules, fits, settled_period
from zbfx.passes.order_problem import INF, Full, Problem, Word


def follow(problem: Problem, order: Sequence[Word], rules: Rules, *, keep: bool = False, cutoff: Cutoff = NO_CUTOFF) -> Outcome:
    """Runs each rank's word in order. An F that does not fit waits for Ws; without any, what comes later and fits is
    pulled forward.

    Ranks are run one after the other as far as their inputs are known, so no event queue is needed: a gap's length is
    known exactly.
    """
    run = _Following(problem, order, rules, keep, cutoff)
    return run.finish() if run.run() else Outcome(INF, INF, (), sum(run.count))


class _Following:
    """The state of `follow`: arrival times, clocks, bytes held and Ws that wait, per rank."""

    def __init__(self, problem: Problem, order: Sequence[Word], rules: Rules, keep: bool, cutoff: Cutoff) -> None:
        m, nodes, ranks = problem.microbatches, len(problem.rank), problem.num_ranks
        self.problem, self.rules, self.keep = problem, rules, keep
        self.words = [list(word) for word in order]
        self.arrival: list[list[float]] = [[0.0] * m + [INF]] + [[INF] * (m + 1) for _ in range(nodes)]
        self.count = [0] * nodes
        self.at, self.clock, self.held = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.first: list[float] = [-1.0] * ranks
        self.pending: list[list[int]] = [[] for _ in range(ranks)]
        self.done_w = [0] * ranks
        self.forwards = [[v for v in own if v < problem.num_stages] for own in problem.nodes]
        self.backwards = [[v for v in reversed(own) if v >= problem.num_stages] for own in problem.nodes]
        self.f_left = [len(own) * m for own in self.forwards]
        self.out: list[Full] = [[] for _ in range(ranks)]
        self.slack, self.from_zero = cutoff.slack(problem), cutoff.from_zero

    def run(self) -> bool:
        """Runs all ranks; False where nothing fits or a rank idled too long.

        One long loop, measured: most letters wake another rank, and a call with its own locals per turn doubles the time.
        """
        problem, rules, keep, words = self.problem, self.rules, self.keep, self.words
        arrival, count, seconds, memory = self.arrival, self.count, problem.seconds, problem.memory
        stages, parts, hop, last, home, stage = (
            problem.num_stages,
            problem.parts,
            problem.hop,
            len(problem.rank),
            (*problem.rank, 0),
            problem.stage,
        )
        w_seconds, w_memory, at, clock = problem.w_seconds, problem.w_memory, self.at, self.clock
        ahead_f, ahead_b, guard, one_part = rules.ahead_f, rules.ahead_b, rules.guard, parts == 1
        need = [memory[v] + problem.reserve[v] for v in range(stages)] if guard else memory
        waits_for = [-1] * problem.num_ranks
        ready = list(range(problem.num_ranks - 1, -1, -1))
        while ready:
            r = ready.pop()
            word, pending, out = words[r], self.pending[r], self.out[r]
            i, t, held, w, f_left, length = at[r], clock[r], self.held[r], self.done_w[r], self.f_left[r], len(words[r])
            room = problem.room[r] + EPS
            while i < length:
                v = word[i]
                if v < stages and held + need[v] > room and not self._fits(r, v, room - held):
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
                        return False
                    word.insert(i, word.pop(k))
                    continue
                j = count[v]
                begin = arrival[v][j]
                if begin > t:
                    if begin == INF:
                        waits_for[r] = v
                        break
                    gap = begin - t
                    x = self._ahead_b(r, v, t, gap) if ahead_b else -1
                    if x < 0 and w < len(pending):
                        s = pending[w]
                        # The last node feeds nobody: once no F is left, a W in front of it can only help.
                        fill = rules.fill if f_left else (rules.fill_end if v + 1 < last else 0.0)
                        if gap >= fill * w_seconds[s] - EPS:
                            w += 1
                            t += w_seconds[s]
                            held -= w_memory[s]
                            if keep:
                                out.append((s, 2))
                            continue
                    if x < 0 and f_left and ahead_f and (ahead_f == 2 or not pending):
                        x = self._ahead_f(r, v, t, gap, room - held)
                    if x >= 0:
                        del word[word.index(x, i + 1)]
                        word.insert(i, x)
                        v, j = x, count[x]
                    else:
                        if i or self.from_zero:
                            self.slack[r] -= gap
                            if self.slack[r] < 0:
                                return False
                        t = begin
                if not i:
                    self.first[r] = t
                i += 1
                t += seconds[v]
                held += memory[v]
                count[v] = j + 1
                if v < stages:
                    f_left -= 1
                    if keep:
                        out.append((v, 0))
                else:
                    s = stage[v]
                    if one_part:
                        pending.append(s)
                    else:
                        pending.extend([s] * parts)
                    if keep:
                        out.append((s, 1))
                v += 1
                arrival[v][j] = t + hop[v - 1]
                other = home[v]
                if waits_for[other] == v:
                    waits_for[other] = -1
                    ready.append(other)
            at[r], clock[r], self.held[r], self.done_w[r], self.f_left[r] = i, t, held, w, f_left
        return True

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
        period = settled_period(self.arrival[-1], problem.microbatches)
        return Outcome(span, makespan, tuple(self.out) if self.keep else (), sum(self.count), period)

    def _fits(self, r: int, v: int, free: float) -> bool:
        return fits(self.problem, self.forwards[r], self.count, v, free, self.rules.guard)

    def _pull(self, r: int, i: int, free: float) -> int:
        """The first later place in the word whose action may run now as far as this rank's own order and memory go; -1 for
        none."""
        word, count, before = self.words[r], self.count, self.problem.before
        seen, kinds = {word[i]}, len(self.problem.nodes[r])
        for k in range(i + 1, len(word)):
            x = word[k]
            if x in seen:
                continue
            reached = before[x] < 0 or count[before[x]] > count[x]
            if reached and (x >= self.problem.num_stages or self._fits(r, x, free)):
                return k
            seen.add(x)
            if len(seen) == kinds:
                break
        return -1

    def _ahead_b(self, r: int, v: int, t: float, gap: float) -> int:
        arrival, count, seconds = self.arrival, self.count, self.problem.seconds
        for x in self.backwards[r]:
            if arrival[x][count[x]] <= t and x != v and seconds[x] <= gap + EPS:
                return x
        return -1

    def _ahead_f(self, r: int, v: int, t: float, gap: float, free: float) -> int:
        problem, count = self.problem, self.count
        free -= problem.memory[v] if v < problem.num_stages else 0.0
        for x in self.forwards[r]:
            ready = x != v and problem.seconds[x] <= gap + EPS and self.arrival[x][count[x]] <= t
            if ready and fits(problem, self.forwards[r], count, x, free, True):
                return x
        return -1
