// SPDX-License-Identifier: MIT OR Apache-2.0

//! The network interface by which an address is reached, from the kernel's lists of routes. RDMA connections use the same routes.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// The flag of a route that is in use, and that of one that refuses packets.
const UP: u32 = 0x1;
const REJECT: u32 = 0x200;

/// A route that includes the address.
struct Route<'a> {
    prefix: u32,
    metric: u32,
    interface: &'a str,
}

/// Returns the interface of the best route, with proc at `proc`: the one with the longest prefix, then the lowest metric.
pub(super) fn interface_to(proc: &Path, address: IpAddr) -> Option<String> {
    let (file, parse): (_, fn(&str, IpAddr) -> Option<Route<'_>>) = match address {
        IpAddr::V4(_) => ("net/route", route_v4),
        IpAddr::V6(_) => ("net/ipv6_route", route_v6),
    };
    let text = fs::read_to_string(proc.join(file)).ok()?;
    let routes = text.lines().filter_map(|line| parse(line, address));
    let best = routes.max_by_key(|route| (route.prefix, u32::MAX - route.metric))?;
    Some(best.interface.to_owned())
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok()
}

fn usable(flags: u32) -> bool {
    flags & UP != 0 && flags & REJECT == 0
}

/// Parses a line of `/proc/net/route`. Addresses are in network order, printed as numbers of the machine.
fn route_v4(line: &str, address: IpAddr) -> Option<Route<'_>> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [interface, destination, _, flags, _, _, metric, mask, ..] = fields[..] else {
        return None;
    };
    let IpAddr::V4(address) = address else { return None };
    let number = |text| Some(u32::from(Ipv4Addr::from(hex(text)?.to_ne_bytes())));
    let mask = number(mask)?;
    let matches = u32::from(address) & mask == number(destination)?;
    (matches && usable(hex(flags)?)).then_some(Route {
        prefix: mask.count_ones(),
        metric: metric.parse().ok()?,
        interface,
    })
}

/// Parses a line of `/proc/net/ipv6_route`.
fn route_v6(line: &str, address: IpAddr) -> Option<Route<'_>> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [destination, prefix, _, _, _, metric, _, _, flags, interface] = fields[..] else {
        return None;
    };
    let IpAddr::V6(address) = address else { return None };
    let prefix = hex(prefix).filter(|prefix| *prefix <= 128)?;
    let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
    let destination = Ipv6Addr::from(u128::from_str_radix(destination, 16).ok()?);
    let matches = u128::from(address) & mask == u128::from(destination);
    (matches && usable(hex(flags)?)).then_some(Route {
        prefix,
        metric: hex(metric)?,
        interface,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn the_longest_prefix_and_then_the_lowest_metric_counts() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("net")).unwrap();
        let route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
            eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
            ib0\t00004E0A\t00000000\t0001\t0\t0\t5\t00FFFFFF\t0\t0\t0\n\
            ib1\t00014E0A\t00000000\t0001\t0\t0\t7\t00FFFFFF\t0\t0\t0\n\
            ib2\t00014E0A\t00000000\t0001\t0\t0\t6\t00FFFFFF\t0\t0\t0\n\
            ib3\t00024E0A\t00000000\t0201\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        fs::write(proc.path().join("net/route"), route).unwrap();
        let route = "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 \
            00000000000000000000000000000000 00000100 00000001 00000000 00000001     ib0\n\
            00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
            fe800000000000000000000000000001 00000400 00000001 00000000 00000003    eth0\n\
            00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
            00000000000000000000000000000000 ffffffff 00000001 00000000 00200200      lo\n";
        fs::write(proc.path().join("net/ipv6_route"), route).unwrap();
        for (address, interface) in [
            ("10.78.0.2", "ib0"),
            ("10.78.1.2", "ib2"),
            ("10.78.2.2", "eth0"),
            ("192.168.0.1", "eth0"),
            ("fd00::7", "ib0"),
            ("fd00:0:0:1::7", "eth0"),
        ] {
            let found = interface_to(proc.path(), address.parse().unwrap());
            assert_eq!(found.as_deref(), Some(interface), "{address}");
        }
        fs::write(proc.path().join("net/route"), "x\n").unwrap();
        assert_eq!(interface_to(proc.path(), "10.78.0.2".parse().unwrap()), None);
        fs::remove_file(proc.path().join("net/route")).unwrap();
        assert_eq!(interface_to(proc.path(), "10.78.0.2".parse().unwrap()), None);
    }
}
