"""From a user's module to graphs: capture, differentiate, estimate."""
