"""Runs every code block of the README and of docs/, in order, each page in a fresh folder.

    python -m scripts.docs [PAGE ...] [-j N]     run pages (default: all), as `make docs` does
    python -m scripts.docs --clone               the README in a fresh clone, with an empty home folder

A page's folder has copies of recipes/ and tests/vectors/, as a clone has. What a fence means:

=================================  =====================================================================================
```bash                            run by ``bash -e``; folder, PATH and exported variables carry over to the next block
```python                          run by ``python``, in a process of its own
```KIND title="FILE"               saved as FILE; a later block must use it
```toml                            a part of a recipe: it is parsed
```text title="output"             what the block before printed: compared (see :mod:`scripts.docs.output`)
```text, ```json, ```diff          shown; nobody runs it
=================================  =====================================================================================

A comment in the line before a fence changes that:

=================================  =====================================================================================
``<!-- not run: REASON -->``       named only: command lines are parsed, Python is compiled (``long`` means the same)
``<!-- install: REASON -->``       needs a package index: run with ``--clone``, elsewhere named only
``<!-- slow: REASON -->``          run here; `make test`, which runs all other blocks, only parses it
``<!-- server -->``                one command: started, asked once at the address that it prints, ended by Ctrl-C
=================================  =====================================================================================
"""
