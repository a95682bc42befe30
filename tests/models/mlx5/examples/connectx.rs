// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves one ConnectX adapter per socket path on the command line. All adapters are on one switch.
//!
//!     connectx /tmp/a.sock /tmp/b.sock

use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use p2pmem_ib::{Fabric, Topology};
use p2pmem_mlx5::{Nic, Settings, VECTORS};
use p2pmem_vfio_user::{Bus, LinkSpeed, Listener, serve};

/// First GUID, locally administered.
const FIRST_GUID: u64 = 0x0200_00ff_fe00_0001;

/// Serves an adapter to one guest after another.
fn serve_nic(nic: &mut Nic, socket: &Path) -> io::Result<()> {
    let listener = Listener::bind(socket)?;
    println!("ready {}", socket.display());
    loop {
        let stream = listener.accept()?;
        if let Err(error) = serve(stream, nic) {
            eprintln!("{}: the connection ended: {error}", socket.display());
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sockets: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if sockets.is_empty() {
        return Err("usage: connectx SOCKET...".into());
    }
    let topology = Topology {
        switches: vec!["sw".to_owned()],
        links: Vec::new(),
    };
    let subnet = Fabric::new(&topology, 1)?;
    let mut threads = Vec::new();
    for (number, socket) in sockets.into_iter().enumerate() {
        let settings = Settings {
            name: format!("mlx5-{number}"),
            guid: FIRST_GUID + number as u64,
            switch: "sw".to_owned(),
            bytes_per_second: None,
            speed: LinkSpeed::Gen4,
            lanes: 16,
        };
        let mut nic = Nic::new(settings, &subnet, Bus::new(VECTORS))?;
        threads.push(thread::spawn(move || {
            serve_nic(&mut nic, &socket).map_err(|error| format!("{}: {error}", socket.display()))
        }));
    }
    for thread in threads {
        thread.join().map_err(|_| "an adapter panicked")??;
    }
    Ok(())
}
