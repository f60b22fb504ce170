"""What every operator runs on: Triton, launches, replays, checks."""
