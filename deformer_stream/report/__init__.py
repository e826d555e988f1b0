"""HTML reports: `pages` renders pages and their parts from templates, `charts` draws charts as inline SVG."""
