"""Tests of pipelines that do without something that a synchronous one has."""
