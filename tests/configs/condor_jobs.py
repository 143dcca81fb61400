"""Make jobs of submit files, as condor_submit would, without a scheduler: JSON texts in, JSON out.

In a process of its own: the bindings look for a configuration when they are imported.
"""

from __future__ import annotations

import json
import sys

import htcondor


def job(text):
    """Its attributes, as texts; a text if it is refused."""
    try:
        (made,) = htcondor.Submit(text).jobs(clusterid=1, procid=0, qdate=1, owner="somebody")
    except htcondor.HTCondorException as error:
        return str(error)
    return {name: str(made[name]) for name in made}


if __name__ == "__main__":
    json.dump([job(text) for text in json.load(sys.stdin)], sys.stdout)
