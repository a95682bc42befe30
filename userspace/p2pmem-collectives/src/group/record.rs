// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a rank publishes for the others through the directory: where it listens, and rank 0 the secret of the job.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};

use super::failure::{name, printable, MAX_HOST};
use super::handshake::{Token, VERSION};

/// Most addresses of a rank that others try.
const MAX_ADDRESSES: usize = 32;

/// What all versions have.
#[derive(Deserialize)]
struct Head {
    version: u32,
    host: String,
}

/// What a rank publishes for the others.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    /// The name of the host, for messages.
    pub(crate) host: String,
    port: u16,
    addresses: Vec<IpAddr>,
    /// The secret, if this is rank 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl Record {
    pub(crate) fn new(host: &str, port: u16, mut addresses: Vec<IpAddr>, token: Option<&Token>) -> Self {
        addresses.truncate(MAX_ADDRESSES);
        Self {
            version: VERSION,
            host: printable(host, MAX_HOST),
            port,
            addresses,
            token: token.map(hex::encode),
        }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).context("encoding the record of this rank")
    }

    /// Decodes the record of the rank.
    ///
    /// # Errors
    ///
    /// The rank has another version of the protocol, or the record is damaged.
    pub(crate) fn decode(rank: usize, bytes: &[u8]) -> Result<Self> {
        let damaged = || format!("rank {rank} published a damaged record: do all ranks run the same program?");
        let head: Head = serde_json::from_slice(bytes).with_context(damaged)?;
        let host = printable(&head.host, MAX_HOST);
        ensure!(
            head.version == VERSION,
            "{} speaks version {} of the protocol of groups, and this rank version {VERSION}: install the same version of \
             p2pmem on all nodes",
            name(rank, &host),
            head.version
        );
        let mut record: Self = serde_json::from_slice(bytes).with_context(damaged)?;
        record.host = host;
        record.addresses.truncate(MAX_ADDRESSES);
        Ok(record)
    }

    /// Returns where the rank listens.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.addresses
            .iter()
            .map(|address| SocketAddr::new(*address, self.port))
    }

    /// Returns the secret of the job from the record of rank 0.
    pub(crate) fn token(&self) -> Result<Token> {
        let mut token = Token::default();
        let text = self.token.as_deref().unwrap_or_default();
        match hex::decode_to_slice(text, &mut token) {
            Ok(()) => Ok(token),
            Err(_) => bail!("rank 0 published no secret: do all ranks run the same program?"),
        }
    }
}

/// Returns the addresses by which other hosts reach this one: all that are not loopback. Without one, those of the loopback device.
///
/// # Errors
///
/// The kernel does not list the addresses.
pub(crate) fn host_addresses() -> Result<Vec<IpAddr>> {
    let interfaces = nix::ifaddrs::getifaddrs().context("listing the addresses of this host")?;
    let mut all: Vec<IpAddr> = Vec::new();
    for interface in interfaces {
        let Some(address) = interface.address else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            all.push(v4.ip().into());
        } else if let Some(v6) = address.as_sockaddr_in6() {
            // An address of a link is of no use without the name of the other host's interface.
            if !v6.ip().is_unicast_link_local() {
                all.push(v6.ip().into());
            }
        }
    }
    Ok(reachable(all))
}

/// Returns the addresses that are not loopback, or those of the loopback device if there is no other.
fn reachable(all: Vec<IpAddr>) -> Vec<IpAddr> {
    let (loopback, mut others): (Vec<IpAddr>, Vec<IpAddr>) = all.into_iter().partition(IpAddr::is_loopback);
    if others.is_empty() {
        others = loopback;
    }
    if others.is_empty() {
        others.push(Ipv4Addr::LOCALHOST.into());
    }
    others.dedup();
    others
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_for_hosts_without_a_network() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (v4, v6, card) = (ip("127.0.0.1"), ip("::1"), ip("192.0.2.7"));
        assert_eq!(reachable(vec![v4, card, v6]), [card]);
        assert_eq!(reachable(vec![v4, v6]), [v4, v6]);
        assert_eq!(reachable(vec![]), [v4]);
        assert!(!host_addresses().unwrap().is_empty());
    }

    #[test]
    fn another_version_is_named_with_both_numbers() {
        let own = Record::new("node-b", 7, vec![], None);
        let mut value: serde_json::Value = serde_json::from_slice(&own.encode().unwrap()).unwrap();
        assert_eq!(Record::decode(1, &own.encode().unwrap()).unwrap().host, "node-b");
        value["version"] = 77.into();
        value["port"] = "elsewhere".into();
        let text = Record::decode(1, value.to_string().as_bytes()).unwrap_err().to_string();
        assert!(text.contains("rank 1 (node-b) speaks version 77"), "{text}");
        assert!(text.contains(&format!("this rank version {VERSION}")), "{text}");
        let text = Record::decode(2, b"{").unwrap_err().to_string();
        assert!(text.starts_with("rank 2 published a damaged record"), "{text}");
    }

    #[test]
    fn only_rank_0_has_the_secret() {
        let token = [7; 16];
        let record = Record::new("a\nb", 1, vec![Ipv4Addr::LOCALHOST.into()], Some(&token));
        let record = Record::decode(0, &record.encode().unwrap()).unwrap();
        assert_eq!((record.token().unwrap(), record.host.as_str()), (token, "ab"));
        assert_eq!(record.addresses().collect::<Vec<_>>(), ["127.0.0.1:1".parse().unwrap()]);
        let text = Record::new("a", 1, vec![], None).token().unwrap_err().to_string();
        assert!(text.contains("no secret"), "{text}");
    }
}
