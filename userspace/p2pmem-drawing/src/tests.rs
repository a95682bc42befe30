// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of transfers in drawings. Those of `p2pmemctl topo` draw machines without transfers.

use std::path::Path;

use p2pmem::devices_in;
use p2pmem::fake::{write_pci_function, Fake};

use super::*;

const ACCELERATOR: &str = "0000:04:00.0";
const NICS: [&str; 2] = ["0000:05:00.0", "0000:06:00.0"];
const DRIVES: [&str; 2] = ["0000:07:00.0", "0000:21:00.0"];

fn addr(text: &str) -> PciAddr {
    text.parse().unwrap()
}

/// A switch with an accelerator, two NICs and a drive, and a drive below another root port.
fn machine() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let sys = folder.path().join("sys");
    let add = |path: &str, class: &str| {
        let files = [("vendor", "0x1de5"), ("device", "0x0001"), ("class", class)];
        write_pci_function(&sys, path, &files).unwrap();
    };
    let switch = "pci0000:00/0000:00:01.0/0000:02:00.0";
    for bridge in ["pci0000:00/0000:00:01.0", switch, "pci0000:00/0000:00:02.0"] {
        add(bridge, "0x060400");
    }
    let below = [
        (ACCELERATOR, "0x120000"),
        (NICS[0], "0x020000"),
        (NICS[1], "0x020000"),
        (DRIVES[0], "0x010802"),
    ];
    for (number, (device, class)) in below.into_iter().enumerate() {
        let port = format!("{switch}/0000:03:{number:02x}.0");
        add(&port, "0x060400");
        add(&format!("{port}/{device}"), class);
    }
    add(&format!("pci0000:00/0000:00:02.0/{}", DRIVES[1]), "0x010802");
    folder
}

fn transfer(number: u64, source: &str, targets: &[&str]) -> Transfer {
    Transfer {
        number,
        name: format!("session {number}"),
        about: format!("session {number}: from the NIC by the memory to the drives"),
        sources: vec![addr(source)],
        memory: addr(ACCELERATOR),
        targets: targets.iter().map(|target| addr(target)).collect(),
    }
}

fn draw(folder: &Path, transfers: Vec<Transfer>) -> Drawing {
    let sys = folder.join("sys");
    let devices = devices_in(&sys).unwrap();
    let device = Fake::new().provider(addr(ACCELERATOR), 1 << 20).device();
    let scene = Scene {
        providers: device.providers().unwrap(),
        clients: devices
            .iter()
            .filter(|d| d.is_likely_client())
            .map(PciDevice::client)
            .collect(),
        transfers,
        ..Scene::default()
    };
    Drawing::new(&sys, &devices, &scene)
}

/// Returns the addresses of the functions with a transfer on the link above.
fn busy(nodes: &[tree::Node]) -> Vec<String> {
    let mut all = Vec::new();
    for node in nodes {
        all.extend(node.addr.filter(|_| node.has_transfer).map(|addr| addr.to_string()));
        all.extend(busy(&node.children));
    }
    all
}

#[test]
fn without_transfers_nothing_is_marked() {
    let folder = machine();
    let drawing = draw(folder.path(), Vec::new());
    assert_eq!(busy(&drawing.roots), Vec::<String>::new());
    assert!(drawing.layout.lanes.is_empty() && drawing.layout.samples.is_empty());
    let svg = drawing.svg();
    assert!(!svg.contains("transfer") && !svg.contains("chosen"), "{svg}");
}

#[test]
fn transfers_mark_the_memory_and_the_links_that_they_pass() {
    let folder = machine();
    // All devices are below the switch: nothing passes the link above the switch.
    let drawing = draw(folder.path(), vec![transfer(0, NICS[0], &DRIVES[..1])]);
    let expected = [
        "0000:03:00.0",
        ACCELERATOR,
        "0000:03:01.0",
        NICS[0],
        "0000:03:03.0",
        DRIVES[0],
    ];
    assert_eq!(busy(&drawing.roots), expected);
    // The second drive is below another root port.
    let drawing = draw(folder.path(), vec![transfer(0, NICS[0], &DRIVES)]);
    let busy = busy(&drawing.roots);
    for bridge in ["0000:00:01.0", "0000:02:00.0", "0000:00:02.0", DRIVES[1]] {
        assert!(busy.iter().any(|addr| addr == bridge), "{bridge}: {busy:?}");
    }
    assert!(!busy.iter().any(|addr| addr == NICS[1]));
    assert_eq!(
        drawing
            .layout
            .boxes
            .iter()
            .filter(|one| one.is_chosen && !one.texts.is_empty())
            .count(),
        1
    );
}

#[test]
fn lines_of_transfers_lead_into_and_out_of_the_memory() {
    let folder = machine();
    let transfers = vec![transfer(4, NICS[0], &DRIVES), transfer(11, NICS[1], &DRIVES)];
    let drawing = draw(folder.path(), transfers);
    let layout = &drawing.layout;
    assert_eq!(layout.lanes.len(), 4);
    let heads = |lane: &layout::Lane| lane.ends.iter().filter(|(.., into)| *into).count();
    assert_eq!(layout.lanes.iter().map(heads).collect::<Vec<_>>(), [1, 2, 1, 2]);
    // Lines and boxes do not overlap, no two ends are at one place, and all is in the drawing.
    let right = layout
        .boxes
        .iter()
        .map(|one| one.rect.x + one.rect.width)
        .max()
        .unwrap();
    assert!(layout.lanes.iter().all(|lane| lane.x > right && lane.x < layout.width));
    let mut heights: Vec<_> = layout
        .lanes
        .iter()
        .flat_map(|lane| &lane.ends)
        .map(|(y, ..)| *y)
        .collect();
    let count = heights.len();
    heights.sort_unstable();
    heights.dedup();
    assert_eq!(heights.len(), count);
    let svg = drawing.svg();
    let document = roxmltree::Document::parse(&svg).unwrap();
    let texts: Vec<_> = document
        .descendants()
        .filter(|node| node.has_tag_name("text"))
        .map(|node| node.text().unwrap_or_default().trim().to_owned())
        .collect();
    for words in [
        "chosen for session 4, session 11",
        "4",
        "11",
        "session 11: from the NIC by the memory to the drives",
    ] {
        assert!(texts.iter().any(|text| text == words), "{words}: {texts:#?}");
    }
    assert!(svg.contains("box provider chosen") && svg.contains("transfer-2"));
    assert!(
        !svg.contains("style="),
        "styles in the document would break the policy of pages"
    );
}

#[test]
fn devices_of_transfers_that_sysfs_does_not_have_are_drawn() {
    let folder = machine();
    let mut gone = transfer(0, "0000:99:00.0", &DRIVES);
    gone.memory = addr("0000:98:00.0");
    let drawing = draw(folder.path(), vec![gone]);
    let svg = drawing.svg();
    assert!(
        svg.contains("0000:98:00.0") && svg.contains("chosen for session 0"),
        "{svg}"
    );
}
