"""Plugin of pytest: workers are forked, as before Python 3.14, since many tests' are no pickles."""

import multiprocessing

multiprocessing.set_start_method("fork")
