"""HTML templates of pages and reports."""
