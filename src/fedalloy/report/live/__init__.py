"""The live page over a folder of runs: a small server on loopback, built on the standard library.

| file | what it does |
|---|---|
| ``guard.py`` | which requests are answered at all |
| ``questions.py`` | what a page asks for, taken apart |
| ``runs.py`` | which runs there are, and one line about each |
| ``gathered.py`` | what a run's index gathers for pictures |
| ``answers.py`` | everything the page shows of a run, as JSON |
| ``watch.py`` | one thread that looks at files and tells the pages what changed |
| ``server.py`` | addresses, answers, streams of events |
"""
