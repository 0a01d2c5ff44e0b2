"""The demo's report: pictures laid out in Python, drawn by templates as inline SVG in one HTML file."""
