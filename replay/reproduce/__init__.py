"""Write a short script that shows the first difference that `locate` finds."""
