// SPDX-License-Identifier: MIT OR Apache-2.0

//! The connections to one storage node, control and RDMA, and waiting for several of them.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{ensure, Result};
use p2pmem_verbs::{Access, Address};

use super::compute::{Compute, Registered};
use super::{reason_of, SessionRequest};
use crate::control::{unexpected, Connection, Reply, Request};
use crate::rdma::{open_nic, Capacity, Endpoint};
use crate::wait::wait;

/// The connections to one storage node.
pub(super) struct Link {
    // Fields are dropped in this order: no request can access memory whose registration has ended.
    pub endpoint: Endpoint,
    /// The accelerator's buffers, registered with the NIC.
    pub registered: Registered,
    pub connection: Connection,
    /// The address of the node, for people.
    name: String,
}

impl Link {
    /// Logs in at the node, and creates a queue pair for the accelerator's buffers. The NIC has `access` to them.
    ///
    /// # Errors
    ///
    /// The node cannot be reached, or refuses the token. The NIC cannot be used, or cannot reach the buffers.
    pub(super) fn open(request: &SessionRequest, compute: &dyn Compute, access: Access) -> Result<Self> {
        let connection = request.remote.connect()?;
        let nic = open_nic(&request.nic)?;
        let buffers = compute.buffers();
        let endpoint = Endpoint::new(
            &nic,
            request.gid_index,
            Capacity {
                sends: 2 * buffers,
                receives: buffers,
                messages_sent: buffers,
                messages_received: buffers,
            },
        )?;
        let registered = compute.register(endpoint.domain(), access)?;
        Ok(Self {
            endpoint,
            registered,
            connection,
            name: request.remote.address.clone(),
        })
    }

    /// Connects to the queue pair of the node, which has `credits` messages in flight at most.
    ///
    /// # Errors
    ///
    /// There are not as many buffers as credits. The queue pairs cannot be connected.
    pub(super) fn connect(&self, address: &Address, credits: u32, buffers: u32) -> Result<()> {
        ensure!(
            (1..=buffers).contains(&credits),
            "the node gives {credits} credits for {buffers} buffers"
        );
        self.endpoint.connect(address)?;
        (0..credits).try_for_each(|place| self.endpoint.post_message_receive(place))
    }

    /// Waits until the node has ended the session.
    fn finished(&mut self) -> Result<()> {
        match self.connection.receive_reply()? {
            Reply::Finished { .. } => Ok(()),
            other => Err(unexpected(&other).into()),
        }
    }

    /// Returns the reason why the session failed, which the node may know.
    pub(super) fn reason(&mut self, error: &anyhow::Error) -> String {
        format!("storage node {}: {}", self.name, reason_of(&mut self.connection, error))
    }
}

/// Ends the sessions of links at their nodes. Returns the links whose nodes do not answer, or ended the session before, by their
/// numbers.
pub(super) fn finish_all<'a>(links: impl Iterator<Item = (usize, &'a mut Link)>) -> Vec<(usize, anyhow::Error)> {
    let mut failed = Vec::new();
    let mut asked = Vec::new();
    // No node waits for another one.
    for (number, link) in links {
        match link.connection.send(&Request::Finish) {
            Ok(()) => asked.push((number, link)),
            Err(error) => failed.push((number, error.into())),
        }
    }
    for (number, link) in asked {
        if let Err(error) = link.finished() {
            failed.push((number, error));
        }
    }
    failed
}

/// Returns how long to wait for nodes.
pub(super) fn timeout_of(sessions: &[SessionRequest]) -> Duration {
    let longest = sessions.iter().map(|session| session.remote.timeout).max();
    longest.unwrap_or(Duration::from_secs(30))
}

/// Waits for something to do on the links, or for `event`, no longer than `limit`. Returns the links that failed, by their numbers.
///
/// # Errors
///
/// The process cannot wait.
pub(super) fn wait_for<'a>(
    links: impl Iterator<Item = (usize, &'a mut Link)>,
    event: Option<BorrowedFd<'_>>,
    limit: Duration,
) -> Result<Vec<(usize, anyhow::Error)>> {
    let mut links: Vec<(usize, &mut Link)> = links.collect();
    let (mut failed, mut missed) = (Vec::new(), false);
    for (number, link) in &mut links {
        match link.endpoint.arm() {
            Ok(completed) => missed |= completed,
            Err(error) => failed.push((*number, error)),
        }
    }
    if missed || !failed.is_empty() {
        return Ok(failed);
    }
    let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
    for (_, link) in &links {
        fds.extend([link.endpoint.as_fd(), link.connection.as_fd()]);
    }
    fds.extend(event);
    wait(&fds, limit)?;
    for (number, link) in links {
        if let Err(error) = link.endpoint.clear_event() {
            failed.push((number, error));
        }
    }
    Ok(failed)
}
