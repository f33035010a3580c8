"""The monitor's web page.

`app.py` serves it, `view.py` says what stands on it, `templates/` and `static/` show that.
docs/decisions/0045-the-page-of-the-monitor.md says why it is built this way. Read first: app.py.
"""
