"""The live page over a folder of runs: a small server on loopback, built on the standard library.

| file | what it does |
|---|---|
| ``guard.py`` | which requests are refused |
| ``questions.py`` | parses requests |
| ``runs.py`` | the list of runs, with one line about each |
| ``gathered.py`` | what a run's index collects for pictures |
| ``answers.py`` | everything the page shows of a run, as JSON |
| ``watch.py`` | one thread that watches files and notifies the pages of changes |
| ``server.py`` | addresses, answers, event streams |
"""
