"""What a pipeline computes, and who needs it. Nothing here knows a schedule, a rank's memory or torch."""

__all__: list[str] = []
