// SPDX-License-Identifier: MIT OR Apache-2.0

//! Addresses of queue pairs, which the two sides of a connection exchange.

use std::io;

use serde::{Deserialize, Serialize};

/// Link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// InfiniBand.
    Infiniband,
    /// Ethernet (RoCE).
    Ethernet,
}

/// Address of a queue pair. Each side of a connection sends its address to the other side, by any protocol.
///
/// An address that another program sent is not trusted: [`Address::check`] checks the ranges of the fields, and
/// [`QueuePair::connect`](crate::QueuePair::connect) calls it.
///
/// ```
/// use p2pmem_verbs::{Address, Link};
///
/// let address = Address {
///     link: Link::Infiniband,
///     lid: 7,
///     gid: [0; 16],
///     qpn: 0x123,
///     psn: 0,
///     mtu: 4096,
///     reads: 16,
/// };
/// assert!(address.check().is_ok());
/// assert!(Address { mtu: 1500, ..address }.check().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// `infiniband` or `ethernet`.
    pub link: Link,
    /// LID of the port; 0 on Ethernet.
    pub lid: u16,
    /// GID of the port.
    pub gid: [u8; 16],
    /// Number of the queue pair, 24 bits.
    pub qpn: u32,
    /// Initial packet sequence number, 24 bits.
    pub psn: u32,
    /// MTU in bytes: 256, 512, 1024, 2048, or 4096.
    pub mtu: u32,
    /// Maximum number of outstanding RDMA READs, at least 1: both those that this side answers, and those that it issues.
    pub reads: u8,
}

impl Address {
    /// Checks the ranges of the fields.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidInput`] if a field is out of range. The message names the field.
    pub fn check(&self) -> io::Result<()> {
        if self.qpn >= 1 << 24 || self.psn >= 1 << 24 {
            return Err(invalid(format!(
                "queue pair number {} or packet number {} has more than 24 bits",
                self.qpn, self.psn
            )));
        }
        if ![256, 512, 1024, 2048, 4096].contains(&self.mtu) {
            return Err(invalid(format!("an MTU of {} bytes is not valid", self.mtu)));
        }
        if self.reads == 0 {
            return Err(invalid("at least one RDMA READ must be possible at a time".to_owned()));
        }
        Ok(())
    }
}

pub(crate) fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> Address {
        Address {
            link: Link::Ethernet,
            lid: 0,
            gid: [0xfe; 16],
            qpn: 0xff_ffff,
            psn: 0xff_ffff,
            mtu: 1024,
            reads: 1,
        }
    }

    #[test]
    fn fields_out_of_range_are_errors() {
        type Change = fn(&mut Address);
        let change: [(&str, Change); 5] = [
            ("24 bits", |a| a.qpn = 1 << 24),
            ("24 bits", |a| a.psn = u32::MAX),
            ("MTU of 1500", |a| a.mtu = 1500),
            ("MTU of 0", |a| a.mtu = 0),
            ("READ", |a| a.reads = 0),
        ];
        for (word, change) in change {
            let mut bad = address();
            change(&mut bad);
            let error = bad.check().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
        assert!(address().check().is_ok());
    }

    #[test]
    fn only_complete_addresses_are_parsed() {
        let text = serde_json::to_value(address()).unwrap();
        assert_eq!(text["link"], "ethernet");
        assert_eq!(serde_json::from_value::<Address>(text.clone()).unwrap(), address());
        let mut surplus = text.clone();
        surplus["more"] = 0.into();
        assert!(serde_json::from_value::<Address>(surplus).is_err());
        for field in ["link", "lid", "gid", "qpn", "psn", "mtu", "reads"] {
            let mut less = text.clone();
            less.as_object_mut().unwrap().remove(field);
            assert!(serde_json::from_value::<Address>(less).is_err(), "{field}");
        }
        let mut negative = text;
        negative["qpn"] = (-1).into();
        assert!(serde_json::from_value::<Address>(negative).is_err());
    }
}
