"""The dashboard: pages rendered here, with a little htmx and Vega, all served from the package."""
