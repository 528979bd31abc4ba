"""What is shown of a report: figures and tables."""
