"""What is wrong with an installation, and how to mend it. Facts are gathered first, and judged by pure functions."""
