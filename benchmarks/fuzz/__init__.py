"""Fuzzing of every way into fedalloy: ``python -m benchmarks.fuzz [--seconds N] [--seed S] [WAY ...]``.

Valid examples are mutated with their structure in mind (a value of a JSON header, a line of a record, a dimension in
the header of an array) and thrown at what reads them. Whatever is not a clean refusal or a clean result is a finding:
any error outside the ``FedalloyError`` family (for ``serve``: an answer beyond 2xx, 4xx, 501, 503 and 505), a hang of
more than 2 seconds, more than 256 MB of memory beyond the input, a file touched outside the case's own folder, an
import, a process or a connection, a number in the server's state that is not finite, an update beyond the norm that was
to be screened.

Why Hypothesis and not atheris: the inputs are structures (TOML, JSON, safetensors, records of Flower), for which
coverage-guided flips of bytes, atheris' strength, mostly find what the first parser refuses. Hypothesis draws which
changes are made, leaves out of a finding those that do not matter, and repeats a run by its seed. It is a dependency of
the tests already and installs everywhere, while atheris brings a libFuzzer for some versions of Python on Linux.

| file | what it does |
|---|---|
| ``watching.py`` | the detectors: time, memory, files, imports, processes |
| ``mutating.py`` | mutations of trees, lines, bytes and arrays |
| ``driving.py`` | many cases of one way in, in a process of its own; what was found |
| ``recipes.py``, ``checkpoints.py``, ... | one way in each: valid examples, and what reads them |
| ``found/`` | what long runs have found, kept as examples that every run begins with |
"""
