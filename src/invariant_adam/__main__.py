"""`python -m invariant_adam` is the lab's command line: no other module of the library names the lab."""

from invariant_adam_lab.__main__ import main

if __name__ == "__main__":
    main()
