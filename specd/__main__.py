"""`python -m specd`."""

from specd.cli import main

raise SystemExit(main())
