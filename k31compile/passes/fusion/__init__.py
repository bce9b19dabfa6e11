"""Fusions: many nodes become one k31 operator."""
