// SPDX-License-Identifier: MIT OR Apache-2.0

//! NICs by name.

use std::sync::Arc;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::Nic;

/// Returns the names of this node's NICs.
///
/// # Errors
///
/// There is none. The message says what to do.
pub fn nic_names() -> Result<Vec<String>> {
    let all = p2pmem_verbs::nics().map_err(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => {
            anyhow::anyhow!("libibverbs is not installed (Debian: apt-get install libibverbs1 ibverbs-providers)")
        }
        _ => anyhow::Error::new(error).context("listing NICs: is the module ib_uverbs loaded?"),
    })?;
    ensure!(
        !all.is_empty(),
        "no RDMA NIC has a driver: load the driver's module, such as mlx5_ib, and see `rdma link`"
    );
    Ok(all)
}

/// Opens all NICs with an active port that this user can open.
///
/// # Errors
///
/// There is none. The message says what to do.
pub fn active_nics() -> Result<Vec<Arc<Nic>>> {
    let open = |name: &String| Nic::open(name).ok().flatten();
    let is_active = |nic: &Arc<Nic>| nic.port().is_ok_and(|port| port.is_active);
    let active: Vec<_> = nic_names()?.iter().filter_map(open).filter(is_active).collect();
    if active.is_empty() {
        // Says why.
        return open_nics(&[]);
    }
    Ok(active)
}

/// Opens the named NICs; without names, the first NIC with an active port.
///
/// # Errors
///
/// A NIC does not exist; the message lists the existing ones.
pub fn open_nics(names: &[String]) -> Result<Vec<Arc<Nic>>> {
    let all = nic_names()?;
    let open = |name: &String| {
        let (name, port) = with_port(name)?;
        let nic = Nic::open(name)
            .with_context(|| format!("opening {name}: does this user have access to /dev/infiniband?"))?;
        let nic = nic.with_context(|| format!("there is no NIC {name}; this machine has {}", all.join(", ")))?;
        ensure!(
            port == PORT,
            "{name} has no port {port} that programs of p2pmem can use: use port {PORT}, or the NIC of the other port (`rdma \
             link` lists all)"
        );
        Ok(nic)
    };
    if !names.is_empty() {
        return names.iter().map(open).collect();
    }
    for name in &all {
        let nic = open(name)?;
        if nic.port().is_ok_and(|port| port.is_active) {
            return Ok(vec![nic]);
        }
    }
    bail!(
        "none of the NICs {} has an active port: see `rdma link`",
        all.join(", ")
    )
}

/// The port of a NIC that connections use.
const PORT: u32 = 1;

/// Splits the name of a NIC and its port: `mlx5_0`, or `mlx5_0/1` as `rdma link` prints it.
fn with_port(text: &str) -> Result<(&str, u32)> {
    match text.split_once('/') {
        None => Ok((text, PORT)),
        Some((name, port)) => {
            let port = port.parse().ok().with_context(|| {
                format!("{port:?} is no port of {name}: name a NIC (mlx5_0), or a NIC and its port (mlx5_0/1)")
            })?;
            Ok((name, port))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_may_be_named_with_its_port() {
        assert_eq!(with_port("mlx5_0").unwrap(), ("mlx5_0", 1));
        assert_eq!(with_port("mlx5_0/1").unwrap(), ("mlx5_0", 1));
        assert_eq!(with_port("mlx5_0/2").unwrap(), ("mlx5_0", 2));
        let error = with_port("mlx5_0/x").unwrap_err().to_string();
        assert!(error.contains("mlx5_0/1"), "{error}");
    }
}
