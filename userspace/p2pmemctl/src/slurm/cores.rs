// SPDX-License-Identifier: MIT OR Apache-2.0

//! The cores of this machine by the numbers that gres.conf uses: logical ones, in the order of sockets, of NUMA nodes in a socket,
//! and of cores in a node, each by its first processor. hwloc and Slurm number cores in this order. The numbers of the kernel's
//! processors can differ from them.

use std::collections::BTreeSet;

use crate::Environment;

/// A core: the first processors of its socket, of its NUMA node, and of itself; and the numbers of socket and node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Core {
    order: [u32; 3],
    socket: u32,
    node: u32,
}

/// The cores of a machine in the order of their numbers.
pub(super) struct Cores(Vec<Core>);

impl Cores {
    /// Reads the cores that are online.
    pub(super) fn read(environment: &Environment) -> Self {
        let nodes = environment.entries("sys/devices/system/node").filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let node = name.strip_prefix("node")?.parse::<u32>().ok()?;
            let list = environment.read(format!("sys/devices/system/node/{name}/cpulist"))?;
            Some((node, parse_list(&list)?))
        });
        let nodes: Vec<(u32, BTreeSet<u32>)> = nodes.collect();
        let mut cores = BTreeSet::new();
        for entry in environment.entries("sys/devices/system/cpu") {
            let name = entry.file_name();
            let Some(cpu) = name
                .to_str()
                .and_then(|name| name.strip_prefix("cpu")?.parse::<u32>().ok())
            else {
                continue;
            };
            let first = |file: &str| {
                let list = environment.read(format!("sys/devices/system/cpu/cpu{cpu}/topology/{file}"))?;
                parse_list(&list)?.first().copied()
            };
            // A processor that is offline has no topology.
            let (Some(of_core), Some(of_socket)) = (first("core_cpus_list"), first("package_cpus_list")) else {
                continue;
            };
            let socket = environment.read(format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"));
            let node = nodes.iter().find(|(_, cpus)| cpus.contains(&cpu));
            cores.insert(Core {
                order: [
                    of_socket,
                    node.and_then(|(_, cpus)| cpus.first().copied()).unwrap_or(0),
                    of_core,
                ],
                socket: socket.and_then(|socket| socket.parse().ok()).unwrap_or(0),
                node: node.map_or(0, |(node, _)| *node),
            });
        }
        Self(cores.into_iter().collect())
    }

    /// Returns the numbers of the cores of a NUMA node, such as `0-7`. `None` if they are unknown, or all cores of the machine.
    pub(super) fn near(&self, node: u32) -> Option<String> {
        let near = self.0.iter().enumerate().filter(|(_, core)| core.node == node);
        let near: Vec<usize> = near.map(|(number, _)| number).collect();
        (!near.is_empty() && near.len() < self.0.len()).then(|| ranges(&near))
    }

    /// Returns whether a socket has cores of several NUMA nodes.
    pub(super) fn has_nodes_in_sockets(&self) -> bool {
        self.0
            .windows(2)
            .any(|pair| pair[0].socket == pair[1].socket && pair[0].node != pair[1].node)
    }
}

/// Parses a list of the kernel, such as `0-3,8`.
fn parse_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?);
    }
    Some(all)
}

/// Writes ascending numbers as ranges.
fn ranges(numbers: &[usize]) -> String {
    let parts = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    parts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Writes a machine: the processors of each core, by NUMA node, by socket.
    fn machine(root: &Path, sockets: &[&[&[&str]]]) -> Cores {
        let mut node = 0;
        for (socket, nodes) in sockets.iter().enumerate() {
            let package = nodes.concat().join(",");
            for cores in *nodes {
                let folder = root.join(format!("sys/devices/system/node/node{node}"));
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join("cpulist"), format!("{}\n", cores.join(","))).unwrap();
                node += 1;
                for core in *cores {
                    for cpu in parse_list(core).unwrap() {
                        let folder = root.join(format!("sys/devices/system/cpu/cpu{cpu}/topology"));
                        fs::create_dir_all(&folder).unwrap();
                        fs::write(folder.join("core_cpus_list"), core).unwrap();
                        fs::write(folder.join("package_cpus_list"), &package).unwrap();
                        fs::write(folder.join("physical_package_id"), socket.to_string()).unwrap();
                    }
                }
            }
        }
        // A processor that is offline, and other entries of the folder.
        fs::create_dir_all(root.join("sys/devices/system/cpu/cpu99")).unwrap();
        fs::create_dir_all(root.join("sys/devices/system/cpu/cpufreq")).unwrap();
        let environment = Environment {
            root: root.to_owned(),
            open: Box::new(|| unreachable!("the device is not needed")),
        };
        Cores::read(&environment)
    }

    #[test]
    fn cores_of_a_node_have_the_numbers_of_their_socket() {
        // As on many servers: the kernel numbers the first threads of all sockets before the second threads.
        let root = tempfile::tempdir().unwrap();
        let cores = machine(root.path(), &[&[&["0,4", "2,6"]], &[&["1,5", "3,7"]]]);
        assert_eq!(cores.near(0).as_deref(), Some("0-1"));
        assert_eq!(cores.near(1).as_deref(), Some("2-3"));
        assert_eq!(cores.near(7), None);
        assert!(!cores.has_nodes_in_sockets());
    }

    #[test]
    fn several_nodes_in_a_socket() {
        let root = tempfile::tempdir().unwrap();
        let cores = machine(root.path(), &[&[&["0", "2"], &["1", "3"]], &[&["4"], &["5"]]]);
        assert_eq!(cores.near(1).as_deref(), Some("2-3"));
        assert_eq!(cores.near(3).as_deref(), Some("5"));
        assert!(cores.has_nodes_in_sockets());
    }

    #[test]
    fn cores_of_the_only_node_need_no_numbers() {
        let root = tempfile::tempdir().unwrap();
        let cores = machine(root.path(), &[&[&["0-1", "2-3"]]]);
        assert_eq!(cores.near(0), None);
        let root = tempfile::tempdir().unwrap();
        assert_eq!(machine(root.path(), &[]).near(0), None);
    }

    #[test]
    fn numbers_become_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }
}
