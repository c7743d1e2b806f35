"""A team that has a queue keeps it: its messages carry action ids, everything else stays ours.

``Publisher`` puts a ticket for every queued action of a class that is ``by_ticket`` into whatever
queue there is; a consumer of that queue gives the id to a ``TicketWorker`` (``TicketThread`` where
consumers are ordinary functions) and acknowledges the message when told so. Their broker may drop,
double, delay and reorder: a ticket is a hint, leases, fences, deadlines and results are the
ledger's.
"""

from stoker.broker.base import Ticket
from stoker.tickets.place import open_ledger
from stoker.tickets.publisher import Publisher
from stoker.tickets.thread import TicketThread
from stoker.tickets.worker import TicketWorker

__all__ = ["Publisher", "Ticket", "TicketThread", "TicketWorker", "open_ledger"]
