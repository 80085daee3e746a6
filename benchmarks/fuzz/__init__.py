"""Fuzzing of every input of fedalloy: ``python -m benchmarks.fuzz [--seconds N] [--seed S] [WAY ...]``.

Valid examples are mutated with their structure in mind (a value of a JSON header, a line of a record, a dimension in
the header of an array) and given to their reader. Everything but a clean refusal or a clean result is a finding:
any error outside the ``FedalloyError`` family (for ``serve``: an answer beyond 2xx, 4xx, 501, 503 and 505), a hang of
more than 2 seconds, more than 256 MB of memory beyond the input, a file touched outside the case's own folder, an
import, a process or a connection, a number in the server's state that is not finite, or an update beyond the norm at
which updates are screened.

Why Hypothesis and not atheris: the inputs are structures (TOML, JSON, safetensors, records of Flower), for which
coverage-guided byte flips, the strength of atheris, mostly find what the first parser refuses. Hypothesis draws the
changes, removes those that are not needed for a finding, and repeats a run by its seed. The tests depend on it already
and it installs everywhere, while atheris needs a libFuzzer that exists for some versions of Python on Linux.

| file | what it does |
|---|---|
| ``watching.py`` | the detectors: time, memory, files, imports, processes |
| ``mutating.py`` | mutations of trees, lines, bytes and arrays |
| ``driving.py`` | many cases of one input in a separate process; collects findings |
| ``recipes.py``, ``checkpoints.py``, ... | one input each: valid examples and their reader |
| ``found/`` | findings of long runs, kept as examples with which every run begins |
"""
