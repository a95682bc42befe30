// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of the program that trusts the other node: UCX parses the server's address and key without a length.

#![allow(unsafe_code)]

use p2pmem_ucx_sys::{Endpoint, RemoteKey, Result, Worker};

use crate::wire::UcxPort;

/// Connects to the server's worker, and returns its memory. Only clients call this, for the server that the operator named with
/// `--mode ucx`.
///
/// # Errors
///
/// The address or the key is damaged or of another version of UCX, or the NIC does not reach that of the server.
pub(crate) fn connect(worker: &Worker, port: &UcxPort) -> Result<(Endpoint, RemoteKey)> {
    // SAFETY: the address is that of the server that the operator has named with `--mode ucx`. The mode is documented to be for servers
    // that may have the rights of this process, so the operator vouches that the server sends what its UCX has packed.
    let endpoint = unsafe { Endpoint::new(worker, &port.worker) }?;
    // SAFETY: as for the address.
    let key = unsafe { endpoint.key(&port.key) }?;
    Ok((endpoint, key))
}
