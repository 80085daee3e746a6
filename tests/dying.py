"""A worker of a comparison that dies at the jobs called 'dies' and answers all others at once."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from fedalloy.studies.compare.jobs import JobNews


def serve(connection: Connection) -> None:
    while (job := connection.recv()) is not None:
        if job.name == "dies":
            os._exit(9)
        connection.send(JobNews(job, "ended", text="finished"))
