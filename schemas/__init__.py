"""The trace format: tables, documents, file layout and errors."""
