"""A typed client of the service.

>>> with Client("https://tuning.example", token="flce_...") as client:
...     job = client.submit(JobRequest(preset="llama3-8b", tokens=[4096]))
...     for event in client.follow(job.id):
...         print(event.kind, event.data)

Training jobs do not use it: ``flce_tune.dispatch.remote`` fetches their one document with the
standard library, so that training needs no HTTP package and waits two seconds at most.
"""

from flce_tune.client.client import Client
from flce_tune.client.stream import Event
from flce_tune.client.transport import Retries

__all__ = ["Client", "Event", "Retries"]
