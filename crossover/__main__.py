"""``python -m crossover`` is the command ``crossover``."""

from crossover.cli import main

if __name__ == "__main__":
    main()
