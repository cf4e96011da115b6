"""What is published about pipelines of this family, and what bpipe's own plans make of it: the source of docs/published.md."""
