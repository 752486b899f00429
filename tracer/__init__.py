"""Recording a trace."""
