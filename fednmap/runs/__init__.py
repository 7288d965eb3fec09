"""Runs on disk: the configuration, what it builds, its execution, and the folder that it leaves."""
