"""The operator's page: it shows incidents in a browser, with live updates, and takes labels.

The templates and styles are in `templates` and `static`. The modules are:

    app, security      routes, forms and sessions; who may see and label incidents
    server             the page in a thread of a process
    store, followers   the content of the page in memory; threads that read it from the logs
    views, system_state, texts, charts   the content of the templates: pages, texts and charts
    live               notices to browsers that something has changed
"""
