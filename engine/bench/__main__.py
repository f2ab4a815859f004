"""`python -m engine.bench`."""

from engine.bench.offline import main

if __name__ == "__main__":
    main()
