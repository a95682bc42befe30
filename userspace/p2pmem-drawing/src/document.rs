// SPDX-License-Identifier: MIT OR Apache-2.0

//! The SVG document of a drawing.

use svg::node::element::{Line, Polygon, Rectangle, Text as TextElement, Title};
use svg::Document;

use crate::layout::{Lane, Layout, Look, Rect, Text, TextBox, CLIENT_MARK};
use crate::tree::Role;

/// Fonts whose characters have one width.
const FONTS: &str = "DejaVu Sans Mono, Liberation Mono, Menlo, Consolas, monospace";
/// The color of clients' marks.
const CLIENT: &str = "#1d63c4";
/// The color of warnings.
const WARNING: &str = "#b3261e";
/// The color of chosen memory.
const CHOSEN: &str = "#b0127b";
/// The colors of transfers.
const TRANSFERS: [&str; 6] = ["#1d5fa8", "#b4500b", "#1c6b3c", "#7b3fa0", "#8a6d00", "#a31621"];
/// Length of an arrow's head, and half of its width.
const HEAD: u32 = 9;
const HALF_HEAD: u32 = 4;
/// The colors of bands, from the outermost to those in other bands.
const BANDS: [&str; 2] = ["#e6effa", "#d3e3f5"];

/// The fill, the color of the border, and the width of the border.
fn style(role: Role) -> (&'static str, &'static str, u32) {
    match role {
        Role::HostBridge => ("#e9e9ec", "#55555c", 1),
        Role::RootPort | Role::Port | Role::Bridge => ("#ffffff", "#8a8a92", 1),
        Role::Switch => ("#bcd6f2", "#2f5f93", 2),
        Role::Provider => ("#bfe6c3", "#1f7a34", 3),
        Role::Memory => ("#fff3c9", "#a97c00", 1),
        Role::Client => ("#ffffff", "#1d63c4", 1),
    }
}

/// The class of a box, for the styles of a page.
fn class(role: Role) -> &'static str {
    match role {
        Role::HostBridge => "host-bridge",
        Role::RootPort | Role::Port | Role::Bridge => "port",
        Role::Switch => "switch",
        Role::Provider => "provider",
        Role::Memory => "memory-device",
        Role::Client => "client",
    }
}

fn rectangle(rect: Rect) -> Rectangle {
    Rectangle::new()
        .set("x", rect.x)
        .set("y", rect.y)
        .set("width", rect.width)
        .set("height", rect.height)
}

fn text(text: &Text) -> TextElement {
    let element = TextElement::new(text.content.as_str())
        .set("x", text.x)
        .set("y", text.y)
        .set("font-size", text.font());
    match text.look {
        Look::Title | Look::Name => element.set("font-weight", "bold"),
        Look::Warning => element.set("fill", WARNING).set("class", "warning"),
        Look::Chosen => element
            .set("fill", CHOSEN)
            .set("font-weight", "bold")
            .set("class", "chosen"),
        Look::Plain => element,
    }
}

fn add_box(document: Document, text_box: &TextBox) -> Document {
    let (fill, border, width) = style(text_box.role);
    let (border, width, mark) = match (text_box.is_chosen, text_box.has_warning) {
        (true, _) => (CHOSEN, 5, " chosen"),
        (false, true) => (WARNING, 2, " warning"),
        (false, false) => (border, width, ""),
    };
    let frame = rectangle(text_box.rect)
        .set("rx", 3)
        .set("class", format!("box {}{mark}", class(text_box.role)))
        .set("fill", fill)
        .set("stroke", border)
        .set("stroke-width", width);
    let mut document = document.add(frame);
    if text_box.is_client {
        let mark = Rect {
            width: CLIENT_MARK,
            ..text_box.rect
        };
        document = document.add(rectangle(mark).set("fill", CLIENT).set("class", "client-mark"));
    }
    for content in &text_box.texts {
        document = document.add(text(content));
    }
    if let Some((bar, used)) = text_box.usage {
        let part = Rect { width: used, ..bar };
        document = document
            .add(
                rectangle(bar)
                    .set("fill", "#ffffff")
                    .set("stroke", border)
                    .set("class", "bar"),
            )
            .add(rectangle(part).set("fill", border).set("class", "used"));
    }
    document
}

/// The color and the class of a transfer.
fn look_of_transfer(number: usize) -> (&'static str, String) {
    let number = number % TRANSFERS.len();
    (TRANSFERS[number], format!("transfer-{}", number + 1))
}

fn line(from: (u32, u32), to: (u32, u32)) -> Line {
    Line::new()
        .set("x1", from.0)
        .set("y1", from.1)
        .set("x2", to.0)
        .set("y2", to.1)
}

/// Adds a line beside the devices, with the lines to the devices. A head shows where data moves into a device.
fn add_lane(mut document: Document, lane: &Lane) -> Document {
    let (color, class) = look_of_transfer(lane.transfer);
    let add = |document: Document, from, to| {
        let line = line(from, to).set("stroke", color).set("stroke-width", 2);
        document.add(line.set("class", format!("transfer {class}")))
    };
    if let (Some(first), Some(last)) = (lane.ends.first(), lane.ends.last()) {
        document = add(document, (lane.x, first.0), (lane.x, last.0));
    }
    for (y, left, into) in &lane.ends {
        let end = if *into { left + HEAD } else { *left };
        document = add(document, (end, *y), (lane.x, *y));
        if *into {
            let points = format!("{left},{y} {end},{} {end},{}", y - HALF_HEAD, y + HALF_HEAD);
            let head = Polygon::new().set("points", points).set("fill", color);
            document = document.add(head.set("class", format!("head {class}")));
        }
    }
    document
}

/// Returns the document.
pub(crate) fn document(layout: &Layout) -> String {
    let whole = Rect {
        x: 0,
        y: 0,
        width: layout.width,
        height: layout.height,
    };
    let mut document = Document::new()
        .set("viewBox", (0, 0, layout.width, layout.height))
        .set("width", layout.width)
        .set("height", layout.height)
        .set("font-family", FONTS)
        .add(Title::new("PCI topology"))
        .set("role", "img")
        .set("aria-label", "PCI topology")
        .add(rectangle(whole).set("fill", "#ffffff").set("class", "page"));
    for (n, band) in layout.bands.iter().enumerate() {
        let outer = layout.bands.iter().take(n).any(|other| contains(other, band));
        let color = if outer { BANDS[1] } else { BANDS[0] };
        document = document.add(
            rectangle(*band)
                .set("rx", 6)
                .set("fill", color)
                .set("class", if outer { "band inner" } else { "band" })
                .set("stroke", "#a9c4e2"),
        );
    }
    for link in &layout.links {
        let line = line((link.from, link.y), (link.to, link.y));
        let (color, width, class) = if link.has_transfer {
            (CHOSEN, 5, "link busy")
        } else {
            ("#55555c", 2, "link")
        };
        document = document.add(line.set("stroke", color).set("stroke-width", width).set("class", class));
    }
    for text_box in &layout.boxes {
        document = add_box(document, text_box);
    }
    for lane in &layout.lanes {
        document = add_lane(document, lane);
    }
    for (number, from, to, y) in &layout.samples {
        let (color, class) = look_of_transfer(*number);
        let line = line((*from, *y), (*to, *y)).set("stroke", color).set("stroke-width", 2);
        document = document.add(line.set("class", format!("transfer {class}")));
    }
    for content in &layout.texts {
        document = document.add(text(content));
    }
    format!("{document}\n")
}

/// Returns whether a rectangle is in another one.
fn contains(outer: &Rect, inner: &Rect) -> bool {
    outer.x <= inner.x
        && outer.y <= inner.y
        && outer.x + outer.width >= inner.x + inner.width
        && outer.y + outer.height >= inner.y + inner.height
}
