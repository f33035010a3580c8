"""Starts recording in every Python process that has this folder in PYTHONPATH.

Python imports a module of this name at startup. Peers are traced this way without the product
knowing about it.
"""

import function_notes

function_notes.begin()
