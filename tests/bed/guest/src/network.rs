// SPDX-License-Identifier: MIT OR Apache-2.0

//! Addresses of guests on one network, and listening sockets.
//!
//! Node number N (from 0) has 10.77.0.N+1 on the emulators' Ethernet, and 10.78.M.N+1 on the IPoIB interface of its NIC
//! number M. The environment of commands has them: `P2PMEM_NODE=a`, `P2PMEM_ADDR_B=10.77.0.2`,
//! `P2PMEM_RDMA_ADDR_B_NIC0=10.78.0.2`.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;

use anyhow::{Context, Result};

use crate::devices::Devices;
use crate::wire::{Listen, Network};

/// State of a listening TCP socket in `/proc/net/tcp`.
const TCP_LISTEN: &str = "0A";

/// Address of a node on the emulators' Ethernet.
pub fn address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, node as u8 + 1)
}

/// Address of a node on the IPoIB interface of one of its NICs.
pub fn rdma_address(node: usize, nic: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, nic as u8, node as u8 + 1)
}

/// Returns the number of a guest in its network.
///
/// # Errors
///
/// The network has no such node.
pub fn number(network: &Network) -> Result<usize> {
    let number = network.nodes.iter().position(|node| *node == network.node);
    number.with_context(|| format!("{:?} is none of the nodes {:?}", network.node, network.nodes))
}

/// Returns the environment with the nodes and their addresses. All nodes have NICs of the same names.
pub fn environment(network: &Network, devices: &Devices) -> BTreeMap<String, String> {
    let upper = |name: &str| name.to_uppercase().replace('-', "_");
    let mut vars = BTreeMap::from([("P2PMEM_NODE".to_owned(), network.node.clone())]);
    for (number, node) in network.nodes.iter().enumerate() {
        let node = upper(node);
        vars.insert(format!("P2PMEM_ADDR_{node}"), address(number).to_string());
        let nics = devices.iter().filter(|(_, device)| device.kind == "nic");
        for (nic, (name, _)) in nics.enumerate() {
            let name = format!("P2PMEM_RDMA_ADDR_{node}_{}", upper(name));
            vars.insert(name, rdma_address(number, nic).to_string());
        }
    }
    vars
}

/// Returns whether a socket in this guest listens on a port now.
///
/// # Errors
///
/// The kernel's lists cannot be read.
pub fn is_listened_on(listen: Listen) -> Result<bool> {
    match listen {
        Listen::Tcp(port) => {
            for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
                let table = fs::read_to_string(file).context(file)?;
                if table.lines().any(|line| tcp_listener(line) == Some(port)) {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Listen::Rdma(port) => {
            let output = Command::new("/usr/bin/rdma")
                .args(["resource", "show", "cm_id"])
                .output()
                .context("rdma resource show cm_id")?;
            let table = String::from_utf8_lossy(&output.stdout);
            Ok(table.lines().any(|line| rdma_listener(line) == Some(port)))
        }
    }
}

/// Returns the port of a line of `/proc/net/tcp` if its socket listens.
fn tcp_listener(line: &str) -> Option<u16> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, _remote, state) = (words.next()?, words.next()?, words.next()?);
    let (_, port) = local.rsplit_once(':')?;
    (state == TCP_LISTEN).then(|| u16::from_str_radix(port, 16).ok())?
}

/// Returns the port of a line of `rdma resource show cm_id` if its id listens.
fn rdma_listener(line: &str) -> Option<u16> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let value = |key: &str| words.windows(2).find(|pair| pair[0] == key).map(|pair| pair[1]);
    if value("state")? != "LISTEN" {
        return None;
    }
    value("src-addr")?.rsplit_once(':')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_ports_are_parsed() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode";
        let row = "   0: 00000000:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1";
        assert_eq!(tcp_listener(head), None);
        assert_eq!(tcp_listener(row), Some(0x4853));
        assert_eq!(tcp_listener(&row.replace(" 0A ", " 01 ")), None);
        assert_eq!(tcp_listener(""), None);
        let row = "link rxe0/1 cm-idn 0 state LISTEN ps TCP pid 88 comm rping src-addr 0.0.0.0:7174";
        assert_eq!(rdma_listener(row), Some(7174));
        assert_eq!(rdma_listener(&row.replace("0.0.0.0", "[::]")), Some(7174));
        assert_eq!(rdma_listener(&row.replace("LISTEN", "CONNECT")), None);
        assert_eq!(rdma_listener("link rxe0/1 cm-idn 0 state LISTEN ps TCP"), None);
    }

    #[test]
    fn nodes_have_addresses_and_variables() {
        let network = Network {
            node: "b".into(),
            nodes: ["a", "b"].map(String::from).into(),
        };
        assert_eq!(number(&network).unwrap(), 1);
        let vars = environment(&network, &Devices::new());
        assert_eq!(vars["P2PMEM_NODE"], "b");
        assert_eq!(vars["P2PMEM_ADDR_A"], "10.77.0.1");
        assert_eq!(rdma_address(1, 0).to_string(), "10.78.0.2");
        let stranger = Network {
            node: "c".into(),
            ..network
        };
        assert!(number(&stranger).is_err());
    }
}
