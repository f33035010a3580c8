"""The monitor's web page.

`app.py` serves it, `view.py` says what stands on it, `templates/` and `static/` show that.
A new page is a template, a route in `app.py` and, where it computes something, a module like
`../what_if.py`. docs/decisions/0045-the-page-of-the-monitor.md says why it is built this way.
Read first: app.py.
"""
