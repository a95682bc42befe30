// SPDX-License-Identifier: MIT OR Apache-2.0

//! Receives: fetching, scattering of messages, and completion.

use tracing::debug;

use super::Context;
use super::qp::Qp;
use super::scatter_gather::parts;
use crate::attributes::{ReceiveFrom, Service};
use crate::host::{Access, Event, Fault, Fetched, Rights};
use crate::work::{Completion, MAX_MESSAGE, Queue, ReceiveWork, Received, Status, UdSource};

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) config: crate::attributes::SrqConfig,
    /// Number of queue pairs that use the queue.
    pub(super) users: usize,
}

/// A receive that was fetched from its queue.
#[derive(Debug)]
pub(super) struct Receive {
    work: ReceiveWork,
    queue: Queue,
    pd: u32,
    cqn: u32,
    /// Bytes received so far.
    pub(super) length: u32,
}

impl Receive {
    /// Returns the length of the longest message that the receive has space for.
    pub(super) fn capacity(&self) -> u64 {
        let capacity = self.work.sges.iter().map(|sge| u64::from(sge.length)).sum::<u64>();
        capacity.min(MAX_MESSAGE.into())
    }

    /// Writes `bytes` to the scatter list from `offset` on.
    pub(super) fn scatter(&self, cx: &mut Context<'_>, qpn: u32, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        parts(&self.work.sges, offset, bytes.len()).try_for_each(|(sge, at)| {
            let access = Access {
                key: sge.key,
                address: sge.address,
                length: sge.length.into(),
                rights: Rights::LocalWrite,
                pd: self.pd,
                qpn,
            };
            cx.host.write(&access, &bytes[at..at + sge.length as usize])
        })
    }
}

impl Qp {
    /// Fetches the next receive for a message. `srqn` is the shared receive queue that an XRC message names. Returns
    /// `None` if the queue is empty.
    ///
    /// # Errors
    ///
    /// No receive can be fetched: the queue does not exist, cannot be read, or has an invalid receive. An invalid
    /// receive is completed.
    pub(super) fn fetch_receive(&mut self, cx: &mut Context<'_>, srqn: u32) -> Result<Option<Receive>, Status> {
        let (queue, pd, cqn) = match (self.config.service, self.config.receive) {
            (Service::Xrc, _) => match cx.shared.srqs.get(&srqn).map(|srq| srq.config) {
                Some(config) => match config.xrc {
                    Some((xrcd, cqn)) if xrcd == self.config.xrcd => (Queue::Shared(srqn), config.pd, cqn),
                    _ => return Err(Status::RemoteInvalidRequest),
                },
                None => return Err(Status::RemoteInvalidRequest),
            },
            (_, ReceiveFrom::Own) => (Queue::Own(self.number), self.config.pd, self.config.receive_cqn),
            (_, ReceiveFrom::Shared(srqn)) => {
                let pd = cx.shared.srqs.get(&srqn).map_or(self.config.pd, |srq| srq.config.pd);
                (Queue::Shared(srqn), pd, self.config.receive_cqn)
            }
            (_, ReceiveFrom::None) => return Err(Status::RemoteInvalidRequest),
        };
        let receive = |work| Receive {
            work,
            queue,
            pd,
            cqn,
            length: 0,
        };
        match cx.host.next_receive(queue) {
            Fetched::Work(work) => {
                if let Queue::Shared(srqn) = queue {
                    cx.check_limit(srqn, work.left);
                }
                Ok(Some(receive(work)))
            }
            Fetched::Empty => Ok(None),
            Fetched::Bad { id, status } => {
                debug!(qpn = self.number, id, ?status, "invalid receive work request");
                let work = ReceiveWork {
                    id,
                    sges: Default::default(),
                    left: 0,
                };
                self.complete_receive(cx, &receive(work), status, Received::Send, false, None);
                Err(status)
            }
            Fetched::Broken => {
                if let Queue::Shared(srqn) = queue {
                    cx.host.event(Event::SrqError { srqn });
                }
                Err(Status::LocalQpOperation)
            }
        }
    }

    /// Wraps a work request of the queue pair's own receive queue.
    pub(super) fn own_receive(&self, work: ReceiveWork) -> Receive {
        let (queue, pd, cqn) = (Queue::Own(self.number), self.config.pd, self.config.receive_cqn);
        Receive {
            work,
            queue,
            pd,
            cqn,
            length: 0,
        }
    }

    pub(super) fn complete_receive(
        &self,
        cx: &mut Context<'_>,
        receive: &Receive,
        status: Status,
        what: Received,
        solicited: bool,
        source: Option<UdSource>,
    ) {
        cx.count_completion(status);
        cx.host.complete(Completion::Receive {
            qpn: self.number,
            cqn: receive.cqn,
            queue: receive.queue,
            id: receive.work.id,
            status,
            length: receive.length,
            what,
            solicited,
            source,
        });
    }
}
