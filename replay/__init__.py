"""Rescore recorded tokens under different numerics."""
