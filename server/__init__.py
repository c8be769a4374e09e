"""Serving over HTTP and on the command line: the only package that knows either."""
