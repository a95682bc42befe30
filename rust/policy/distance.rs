// SPDX-License-Identifier: GPL-2.0

//! The distance of a provider from all clients of a request.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::path::{
    indexed,
    narrowest,
    Path,
    PathClass, //
};

/// Summary of the paths between a candidate and all clients.
///
/// `worst` is the class and the hops of the farthest path, `worst_client` is its client; `hops` is the sum of all paths;
/// `bandwidth` is the narrowest known link in MB/s; `numa_distance` is the largest. 0 means unknown.
pub(super) struct Reach {
    pub(super) worst_client: usize,
    worst: Option<(PathClass, u32)>,
    pub(super) hops: u32,
    pub(super) bandwidth: u32,
    pub(super) numa_distance: u32,
}

impl Reach {
    pub(super) fn of(clients: usize, paths: &[Path]) -> Self {
        let mut reach = Self {
            worst_client: 0,
            worst: None,
            hops: 0,
            bandwidth: 0,
            numa_distance: 0,
        };
        for (client, path) in indexed(paths).take(clients) {
            reach.note(client, (path.class, path.hops));
            reach.hops = reach.hops.saturating_add(path.hops);
            reach.bandwidth = narrowest(reach.bandwidth, path.bandwidth);
            reach.numa_distance = reach.numa_distance.max(path.numa_distance);
        }
        if paths.len() < clients {
            reach.note(paths.len(), (PathClass::Unreachable, u32::MAX));
        }
        reach
    }

    /// Keeps the farthest path; the first one of equal paths.
    fn note(&mut self, client: usize, distance: (PathClass, u32)) {
        if self.worst.is_none_or(|worst| distance > worst) {
            self.worst = Some(distance);
            self.worst_client = client;
        }
    }

    pub(super) fn class(&self) -> Option<PathClass> {
        self.worst.map(|(class, _)| class)
    }
}
