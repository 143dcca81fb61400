"""A save: from the live state to the commit, and what other hosts keep of it."""
