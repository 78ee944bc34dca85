"""Realistic programs with planted mistakes, and delicate programs that are right.

`assert_equivalent` is measured with them: `python -m property_tests.planted.measure`.

- `models_*.py`: training and decoding steps as users write them, each right on every mesh. A comment under
  a line says what a mistaken author would have written in its place.
- `mistakes.py` reads these comments and loads a model with one of the mistakes in it.
- `lines.py` says which lines are right for a mistake, and which a report names.
- `delicate_*.py`: right programs that tempt a check to accuse them. `delicate.py` lists them.
- `measure.py` runs all of them in a pool of processes and prints tables, with `table.py`.
"""
