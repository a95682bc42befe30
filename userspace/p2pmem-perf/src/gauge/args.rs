// SPDX-License-Identifier: MIT OR Apache-2.0

//! Options of `gauge`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use p2pmem_payload::value::seconds;

use crate::cli::PORT;

/// The TCP port of the page.
const PAGE_PORT: u16 = 8521;

/// The address of a server, `HOST` or `HOST:PORT`; an address of IPv6 with a port has brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    /// Its name or address.
    pub host: String,
    /// Its TCP port.
    pub port: u16,
}

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is no server: specify HOST or HOST:PORT, such as node-b:{PORT}");
        let (host, port) = match text.rsplit_once(':') {
            // Several colons without brackets are an address of IPv6 without a port.
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                (host, port.parse().map_err(|_| invalid())?)
            }
            _ => (text, PORT),
        };
        let host = host.strip_prefix('[').map_or(host, |inner| inner.trim_end_matches(']'));
        if host.is_empty() || host.starts_with('-') || port == 0 {
            return Err(invalid());
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Options of `gauge`.
#[derive(Debug, Clone, Args)]
pub struct GaugeArgs {
    /// The server. It must run with --forever.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub server: ServerAddress,

    /// Where to serve the page. A reverse proxy adds TLS.
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = SocketAddr::from(([127, 0, 0, 1], PAGE_PORT)))]
    pub listen: SocketAddr,

    /// File with the token for the login, which only its owner and its group can read [default: a new token, which is
    /// printed]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// Device file of p2pmem.
    #[arg(long, value_name = "PATH", env = "P2PMEM_DEV_PATH", hide_env_values = true,
          default_value = p2pmem::DEFAULT_PATH)]
    pub dev_path: PathBuf,

    /// Index of the GID to use; only relevant on Ethernet.
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pub gid_index: u8,

    /// Longest wait for the server or for a completion.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_a_host_and_perhaps_a_port() {
        let parse = |text: &str| text.parse::<ServerAddress>().map(|server| (server.host, server.port));
        assert_eq!(parse("b"), Ok(("b".into(), PORT)));
        assert_eq!(parse("10.0.0.2:7"), Ok(("10.0.0.2".into(), 7)));
        assert_eq!(parse("fe80::1"), Ok(("fe80::1".into(), PORT)));
        assert_eq!(parse("[fe80::1]:7"), Ok(("fe80::1".into(), 7)));
        for text in ["", ":7", "b:", "b:x", "b:0", "b:70000", "--help"] {
            assert!(parse(text).unwrap_err().contains("HOST:PORT"), "{text}");
        }
        for text in ["b:18520", "[fe80::1]:7"] {
            assert_eq!(text.parse::<ServerAddress>().unwrap().to_string(), text);
        }
    }
}
