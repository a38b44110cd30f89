"""What the exit code of ``flce-tune`` means.

==== =====================================================================
code meaning
==== =====================================================================
0    done
1    failure: the message on stderr says what failed and what helps
2    usage: an option or value that is not accepted
3    the tuning database cannot be used
4    nothing found: the question was fine, nothing stored answers it
130  interrupted (Ctrl-C); what was measured is stored
==== =====================================================================
"""

from __future__ import annotations

from flce_tune.errors import FlceTuneError, StoreError

FAILURE = 1
DATABASE = 3
NOTHING_FOUND = 4
INTERRUPTED = 130


class NothingFoundError(FlceTuneError):
    """Nothing stored answers the question; the message says how to get an answer."""


def code_of(error: FlceTuneError) -> int:
    """The exit code an expected error ends the process with."""
    if isinstance(error, StoreError):
        return DATABASE
    if isinstance(error, NothingFoundError):
        return NOTHING_FOUND
    return FAILURE
