"""Merging the files of many writers into few, in the order of their steps."""
